-- Open a batch, if fewer of its tenant are open. KEYS: the batch, a hash; a sorted set of the tenant's batches by the time
-- of their making; a set of the open ones. ARGV: id, the most open ones, the most that are kept, then fields and values.
-- Answers "ok" or "full". The oldest of the sorted set make room: those whose time is over, and of more than are kept
-- those that have ended, of which a client may make any number.
if redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[2]) then return {'full'} end
redis.call('ZADD', KEYS[2], clock(), ARGV[1]) -- first: what fails has written nothing
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
redis.call('SADD', KEYS[3], ARGV[1])
for _, old in ipairs(redis.call('ZRANGE', KEYS[2], 0, ARGV[2] + 9)) do
  local batch, is_open = KEYS[1]:sub(1, -1 - #ARGV[1]) .. old, redis.call('SISMEMBER', KEYS[3], old) == 1
  if not is_open and redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[3]) then redis.call('DEL', batch) end
  local has_status = redis.pcall('HEXISTS', batch, 'status') -- an error of a damaged one, which stays
  if has_status == 0 then redis.call('ZREM', KEYS[2], old) end
end
return {'ok'}
