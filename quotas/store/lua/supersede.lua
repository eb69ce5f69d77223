-- Undo what earlier attempts of a request took and booked. The mark that stays of each lets its replica, which may live
-- on, settle it to nothing. KEYS: the tenant's state. ARGV: what the fields of its reservations end with.
local all, last = redis.call('HGETALL', KEYS[1]), '%.' .. ARGV[1] .. '$'
local now = max(clock(), tonumber(redis.call('HGET', KEYS[1], 'now') or 0))
for i = 1, #all, 2 do
  local field = all[i]
  if field:sub(1, 2) == 'r:' and field:match(last) then
    local record = opened(all[i + 1])
    give_back(KEYS[1], record, 0, 0, 0)
    book(KEYS[1], now, record.spec[SPEC], 0, -record.input, -record.cached, -record.output, 0)
    redis.call('HDEL', KEYS[1], field)
    redis.call('HSET', KEYS[1], superseded(field), int(now + MARK_LIFE))
  end
end
return {'OK'}
