-- Take the lease of a batch that no living replica has. KEYS: the batch. ARGV: how long the lease lasts (us). Answers its
-- new epoch, which each call of its holder names: calls of an earlier holder change nothing. "0": another one has it.
local now, lease, status = clock(), unpack(redis.call('HMGET', KEYS[1], 'lease', 'status'))
if not status or tonumber(lease or 0) > now then return {'0'} end
redis.call('HSET', KEYS[1], 'lease', string.format('%.0f', now + ARGV[1]))
return {tostring(redis.call('HINCRBY', KEYS[1], 'epoch', 1))}
