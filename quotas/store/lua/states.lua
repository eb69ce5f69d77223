-- What is used of each limit now, what of it is set aside, and what counts as used since replicas were lost. Writes
-- nothing.
if due() then return {'RECLAIM', due()} end

local _, figures, _, asides = charged()
append(figures, asides)
for _, scope in ipairs(scopes) do
  for i = scope.first, scope.last do
    local window, from, lost = spec[SPEC + i + 2 * n], 0, 0
    local noted = is_budget(window) and redis.call('HGET', scope.key, 'lost:' .. spec[SPEC + i])
    if noted then from, lost = struct.unpack(LOST, noted) end
    figures[2 * n + i] = noted and from >= first_day(window, floor(now / QUARTER)) and lost or 0
  end
end
return reply('OK', figures)
