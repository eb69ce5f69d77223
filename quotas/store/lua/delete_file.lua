-- Forget a file. KEYS as in put_file.lua. ARGV: id. Answers "ok" or "missing".
local said = ARGV[1] ~= '' and redis.call('HGET', KEYS[1], ARGV[1])
if not said then return {'missing'} end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HINCRBY', KEYS[1], '', -(said:match('^%d+') or 0)) -- a damaged one does not tell its bytes
return {'ok'}
