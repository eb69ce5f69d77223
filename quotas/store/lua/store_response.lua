-- Store a response, for which the oldest of its tenant make room.
-- KEYS: those of the tenant's responses. ARGV: id, the id of the one before it ('': none), contents, how long it is
-- stored (us), the most bytes of all. Answers "ok" and the number that made room, or "too_large".
local now, life, most = clock(), tonumber(ARGV[4]), tonumber(ARGV[5])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  forget(KEYS, id)
end
forget(KEYS, ARGV[1])
local said = string.format('%.0f ', now + life) .. ARGV[2] .. ' ' .. ARGV[3]
if #said > most then
  return { 'too_large' }
end
local total, evicted = tonumber(redis.call('HGET', KEYS[1], '') or 0), 0
while total + #said > most do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest then
    break
  end
  forget(KEYS, oldest)
  evicted = evicted + 1
  total = tonumber(redis.call('HGET', KEYS[1], ''))
end
redis.call('HSET', KEYS[1], ARGV[1], said)
redis.call('HINCRBY', KEYS[1], '', #said)
redis.call('ZADD', KEYS[2], now + life, ARGV[1])
local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, math.ceil((last - now) / 1000))
end
return { 'ok', tostring(evicted) }
