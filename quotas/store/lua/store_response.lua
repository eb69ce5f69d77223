-- Store a response, for which the oldest of its tenant make room.
-- KEYS: those of the tenant's responses. ARGV: id, the id of the one before it ('': none), contents, how long it is
-- stored (us), the most bytes of all, the id before the one that it replaces ('*': of any, or none). Answers "ok",
-- "too_large", "changed" if there is none to replace, or "again" if more have to make room than one call forgets, so
-- that the store stands still for no tenant.
local now, life, most, MOST_FORGOTTEN = clock(), tonumber(ARGV[4]), tonumber(ARGV[5]), 500
if ARGV[6] ~= '*' then
  local said = redis.call('HGET', KEYS[1], ARGV[1])
  if not said or said:match('^%d+ (%S*) ') ~= ARGV[6] then
    return { 'changed' }
  end
end
local before = string.format('%.0f ', now + life) .. ARGV[2] .. ' '
local size = #before + #ARGV[3]
if size > most then
  return { 'too_large' }
end
forget(KEYS, ARGV[1])
local total = tonumber(redis.call('HGET', KEYS[1], '') or 0)
local oldest = redis.call('ZRANGE', KEYS[2], 0, MOST_FORGOTTEN - 1, 'WITHSCORES')
for i = 1, #oldest, 2 do
  if tonumber(oldest[i + 1]) > now and total + size <= most then
    break
  end
  forget(KEYS, oldest[i])
  total = tonumber(redis.call('HGET', KEYS[1], ''))
end
if total + size > most and #oldest > 0 then
  return { 'again' }
end
redis.call('HSET', KEYS[1], ARGV[1], before .. ARGV[3])
redis.call('HINCRBY', KEYS[1], '', size)
redis.call('ZADD', KEYS[2], now + life, ARGV[1])
local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, math.ceil((last - now) / 1000))
end
return { 'ok' }
