-- Book usage that no limit counted, once for each ordinal of a replica.
-- KEYS: the tenant's state. ARGV: replica, ordinal, then for each key its name, requests, input, cached, output, KV byte
-- seconds.
local booked = KEYS[1] .. ':booked'
if tonumber(redis.call('HGET', booked, ARGV[1]) or 0) >= tonumber(ARGV[2]) then return {'OK'} end
local now = clock()
for a = 3, #ARGV, 6 do
  local r, i, c, o, kv = unpack(ARGV, a + 1, a + 5)
  book(KEYS[1], now, ARGV[a], tonumber(r), tonumber(i), tonumber(c), tonumber(o), tonumber(kv))
end
redis.call('HSET', booked, ARGV[1], ARGV[2])
redis.call('EXPIRE', booked, 86400)
return {'OK'}
