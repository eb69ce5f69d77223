-- Undo what earlier attempts of a request took and booked. The mark that stays of each lets its replica, which may live
-- on, settle it to nothing. KEYS: the tenant's state. ARGV: the request.
local now = max(clock(), tonumber(redis.call('HGET', KEYS[1], 'now') or 0))
for field, text in attempts(KEYS[1], ARGV[1]) do
  local record = opened(text)
  give_back(KEYS[1], record, 0, 0, 0, 0)
  book(KEYS[1], row_of(record.spec), 0, -record.input, -record.cached, -record.output, 0)
  remove(KEYS[1], field)
  redis.call('HSET', KEYS[1], superseded(field), int(now + MARK_LIFE))
end
return {'OK'}
