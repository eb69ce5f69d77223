-- Book usage that no limit counted, once for each ordinal of a replica.
-- KEYS: the tenant's state. ARGV: replica, ordinal, then for each row of the ledger its name, requests, input, cached,
-- output, KV byte seconds, microseconds of the engine, reasoning.
local booked = KEYS[1] .. ':booked'
if tonumber(redis.call('HGET', booked, ARGV[1]) or 0) >= tonumber(ARGV[2]) then return {'OK'} end
for a = 3, #ARGV, 8 do
  local numbers = {}
  for place = 1, 7 do numbers[place] = tonumber(ARGV[a + place]) end
  local failed = book(KEYS[1], ARGV[a], unpack(numbers))
  if failed then return failed end -- of the first row: its replica keeps them all, and tries again
end
redis.call('HSET', booked, ARGV[1], ARGV[2])
redis.call('EXPIRE', booked, 86400)
return {'OK'}
