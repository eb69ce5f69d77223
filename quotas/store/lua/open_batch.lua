-- Open a batch, if fewer of its tenant are open. KEYS: the batch, a hash; a sorted set of the tenant's batches by the time
-- of their making; a set of the open ones. ARGV: id, the most open ones, then fields and values. Answers "ok" or "full".
-- The oldest of the sorted set whose time is over make room, so that it does not grow for ever.
if redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[2]) then return {'full'} end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('ZADD', KEYS[2], clock(), ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
for _, old in ipairs(redis.call('ZRANGE', KEYS[2], 0, 9)) do
  if redis.call('HEXISTS', KEYS[1]:sub(1, -1 - #ARGV[1]) .. old, 'status') == 0 then redis.call('ZREM', KEYS[2], old) end
end
return {'ok'}
