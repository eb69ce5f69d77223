-- Keep the record of a file, in place of one of its id, within the bytes of all files of its tenant.
-- KEYS: a hash of records by id, with the bytes of all under "", and a sorted set of ids by the time of their making;
-- and of a file of results the batch. ARGV: id, bytes, when it expires (us), record, the most bytes of all; and the epoch
-- of the batch's holder. Answers "ok", "full", or "stale" to one who has lost the lease.
local now = clock()
if KEYS[3] and redis.call('HGET', KEYS[3], 'epoch') ~= ARGV[6] then return {'stale'} end
local total = tonumber(redis.call('HGET', KEYS[1], '') or 0)
local earlier = redis.call('HGET', KEYS[1], ARGV[1])
if earlier then total = total - (earlier:match('^%d+') or 0) end
if total + ARGV[2] > tonumber(ARGV[5]) then return {'full'} end
redis.call('ZADD', KEYS[2], now, ARGV[1]) -- first: what fails has written nothing
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4])
redis.call('HSET', KEYS[1], '', string.format('%.0f', total + ARGV[2]))
return {'ok'}
