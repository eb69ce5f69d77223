-- Open a batch, if fewer of its tenant are open. KEYS: the batch, a hash; a sorted set of the tenant's batches by the time
-- of their making; a set of the open ones. ARGV: id, the most open ones, then fields and values. Answers "ok" or "full".
if redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[2]) then return {'full'} end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('ZADD', KEYS[2], clock(), ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
return {'ok'}
