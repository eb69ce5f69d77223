-- What is used of each limit now, what of it is set aside, and what counts as used since replicas were lost. Writes
-- nothing.
if lease and now >= lease then return {'RECLAIM'} end

local _, figures, _, asides = charged()
append(figures, asides)
for i = 1, n do
  local field = SPEC + i
  local noted = redis.call('HGET', KEYS[i > own and 2 or 1], 'lost:' .. spec[field])
  local from, lost = 0, 0
  if noted then from, lost = struct.unpack(LOST, noted) end
  figures[2 * n + i] = from == first_day(spec[field + 2 * n], floor(now / DAY)) and lost or 0
end
return reply('OK', figures)
