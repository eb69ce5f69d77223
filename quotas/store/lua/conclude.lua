-- Settle a request whose answer was cut short by the part that its router delivered.
-- The mark that stays lets its replica, which may live on, settle it to nothing. KEYS: the tenant's state. ARGV: the
-- request, whether its answer had begun (1 or 0), and output that was delivered (-1: that is not known, and what is
-- booked counts), token of the call. Answers how many reservations there were.
local now, found = max(clock(), tonumber(redis.call('HGET', KEYS[1], 'now') or 0)), 0
for field, text in attempts(KEYS[1], ARGV[1]) do
  local record, r, input, cached, output = opened(text), 0, 0, 0, 0
  if ARGV[2] == '1' then
    r, input, cached, output = record.asked.r, record.asked.i, record.cached, tonumber(ARGV[3])
    output = min(output < 0 and record.output or output, record.asked.o)
  end
  give_back(KEYS[1], record, r, input, cached, output)
  local more_input, more_cached = input - record.input, cached - record.cached
  book(KEYS[1], row_of(record.spec), r, more_input, more_cached, output - record.output, 0)
  remove(KEYS[1], field)
  redis.call('HSET', KEYS[1], superseded(field), int(now + MARK_LIFE))
  found = found + 1
end
if found > 0 then
  done(KEYS[1], ARGV[4])
elseif was_done(KEYS[1], ARGV[4]) then
  found = 1
end
return {'OK', string.format('%d', found)}
