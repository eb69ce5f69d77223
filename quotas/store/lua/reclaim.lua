-- Settle at its booked progress what nobody holds any more: reservations of replicas whose lease has run out, and those
-- of this replica that it does not name, if they are older than `bound`. Slices of such replicas are forfeited; those of
-- this replica's earlier lives are given back, of which it knows that nothing was spent.
-- KEYS: the state of a tenant or of a scope that tenants share; for a tenant, the states of such scopes, which are told
-- until when it need not be reclaimed for them. ARGV: replica, lease (us), bound (an ordinal), the first ordinal of this
-- life, then the fields of its live reservations. Answers "OK", or "AGAIN" if there is more than one call settles, so that
-- the store stands still for no tenant; then the states of tenants that are to be reclaimed for this scope.
local all = redis.call('HGETALL', KEYS[1])
local state, live, expiries = {}, {}, {}
for i = 1, #all, 2 do state[all[i]] = all[i + 1] end
for i = 5, #ARGV do live[ARGV[i]] = true end
local now = max(clock(), tonumber(state.now or 0))
for field, value in pairs(state) do
  local replica = field:match('^p:(.*)$')
  if replica then expiries[replica] = tonumber(value) end
end
expiries[ARGV[1]] = now + ARGV[2]

local function abandoned(field, replica, ordinal) -- from `bound` on, a call that reserves may be on its way
  if replica == ARGV[1] then return tonumber(ordinal) < tonumber(ARGV[3]) and not live[field] end
  return now >= (expiries[replica] or 0)
end

local MOST_SETTLED, settled = 500, 0 -- reservations, marks and slices
local FORFEITED_LIFE = 32 * DAY -- longer than any budget's period
local gone, members, has_reservations = {}, {}, false
for field, value in pairs(state) do
  if settled + #gone >= MOST_SETTLED then break end
  local replica, ordinal = field:match('^r:(%x+)%.(%d+)%.?%x*$')
  if replica and abandoned(field, replica, ordinal) then
    settled = settled + 1
    local record = opened(value)
    -- This life of this replica does not name it, so that its request never ran; an earlier life's, or another's, may have.
    local never_ran = replica == ARGV[1] and tonumber(ordinal) >= tonumber(ARGV[4])
    local requests = never_ran and 0 or record.asked.r
    give_back(KEYS[1], record, requests, record.input, record.cached, record.output)
    book(KEYS[1], row_of(record.spec), requests, 0, 0, 0, 0)
    remove(KEYS[1], field)
    if replica ~= ARGV[1] then -- it may live, and settle or restore it
      redis.call('HSET', KEYS[1], reclaimed(field), int(requests) .. ' ' .. int(now + MARK_LIFE))
    end
  elseif replica then
    has_reservations = true
  end
  local former, count = field:match('^[xg]:(%x+)%.(%d+)')
  if former == ARGV[1] then
    if tonumber(count) < tonumber(ARGV[4]) then gone[#gone + 1] = field end
  elseif former and now >= max(expiries[former] or 0, tonumber(value:match('%d+$'))) then
    gone[#gone + 1] = field
  end
  local owner, number = field:match('^s:(%x+)%.(%d+)$')
  if owner == ARGV[1] and tonumber(number) < tonumber(ARGV[4]) then
    give_up(KEYS[1], cmsgpack.unpack(value), now)
    gone[#gone + 1] = field
  elseif owner and owner ~= ARGV[1] and now >= (expiries[owner] or 0) then
    local slice = cmsgpack.unpack(value)
    if not slice.forfeited then
      settled = settled + 1
      redis.call('HSET', KEYS[1], field, forfeit(KEYS[1], slice, now))
    elseif now >= slice.ended + FORFEITED_LIFE then
      gone[#gone + 1] = field
    end
  end
end

local is_whole, earliest = settled + #gone < MOST_SETTLED, now + ARGV[2]
for replica, expiry in pairs(expiries) do
  if now < expiry then
    earliest = min(earliest, expiry)
  elseif is_whole then
    gone[#gone + 1] = 'p:' .. replica
  end
end
for field, value in pairs(state) do
  local member = field:match('^t:(.*)$')
  if member and now >= tonumber(value) and #members < MOST_SETTLED then members[#members + 1] = member end
  -- Members whose leases end one after another are not looked for at the end of each.
  if member then earliest = min(earliest, max(tonumber(value), now + (#members > 0 and 0 or ARGV[2] / 4))) end
end
for _, field in ipairs(gone) do redis.call('HDEL', KEYS[1], field) end
if next(state) then
  redis.call('HSET', KEYS[1], 'now', int(now), 'p:' .. ARGV[1], int(now + ARGV[2]), 'lease', int(earliest))
end
for i = 2, #KEYS do
  if has_reservations or not is_whole then
    redis.call('HSET', KEYS[i], 't:' .. KEYS[1], int(is_whole and earliest or now))
  else
    redis.call('HDEL', KEYS[i], 't:' .. KEYS[1])
  end
end
return {is_whole and 'OK' or 'AGAIN', unpack(members)}
