-- Book usage that no limit counted, once for each ordinal of a replica.
-- KEYS: the tenant's state. ARGV: replica, ordinal, then for each row of the ledger its name, requests, input, cached,
-- output, KV byte seconds, microseconds of the engine.
local booked = KEYS[1] .. ':booked'
if tonumber(redis.call('HGET', booked, ARGV[1]) or 0) >= tonumber(ARGV[2]) then return {'OK'} end
local now = clock()
for a = 3, #ARGV, 7 do
  local r, i, c, o, kv, us = unpack(ARGV, a + 1, a + 6)
  book(KEYS[1], now, ARGV[a], tonumber(r), tonumber(i), tonumber(c), tonumber(o), tonumber(kv), tonumber(us))
end
redis.call('HSET', booked, ARGV[1], ARGV[2])
redis.call('EXPIRE', booked, 86400)
return {'OK'}
