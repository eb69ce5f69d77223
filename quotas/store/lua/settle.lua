-- Return what a reservation took beyond its use, and book its use. The second time, nothing happens: GONE. RECLAIMED: it
-- was not settled, and is to be restored first.
-- KEYS: the tenant's state. ARGV: field of the reservation, requests, input, cached, output, KV byte seconds,
-- reasoning.
local text = redis.call('HGET', KEYS[1], ARGV[1])
if not text then
  if redis.call('HDEL', KEYS[1], superseded(ARGV[1])) == 1 then return {'OK'} end
  return {redis.call('HEXISTS', KEYS[1], reclaimed(ARGV[1])) == 1 and 'RECLAIMED' or 'GONE'}
end
local record = opened(text)
local r, i, c, o, kv = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local reasoning = tonumber(ARGV[7])
give_back(KEYS[1], record, r, i, c, o, reasoning)
remove(KEYS[1], ARGV[1])
local input, cached, output = max(i - record.input, 0), max(c - record.cached, 0), max(o - record.output, 0)
book(KEYS[1], row_of(record.spec), r, input, cached, output, kv, 0, reasoning)
return {'OK'}
