-- Add what a replica has served to the sums of all, once for each ordinal, and tell it which sums have changed.
-- KEYS: the sums by tenant, the versions in which they changed, the replicas. ARGV: replica, ordinal, version that it
-- read last ('': none), time in which a replica counts and in which silence is remembered (us); then tenant, served ...
local now, counts, life = clock(), tonumber(ARGV[4]), tonumber(ARGV[5])
local replicas, known, live = redis.call('HGETALL', KEYS[3]), { version = '0', [ARGV[1]] = '0 0' }, 1
for i = 1, #replicas, 2 do
  known[replicas[i]] = replicas[i + 1]
  local seen = tonumber(replicas[i + 1]:match(' (%d+)$'))
  if seen and replicas[i] ~= ARGV[1] then
    if seen < now - life then
      redis.call('HDEL', KEYS[3], replicas[i])
    elseif seen >= now - counts then
      live = live + 1
    end
  end
end

-- A version is the time, and grows; after a loss of the store it still does, for those who have read one.
local version = math.max(tonumber(known.version), tonumber(ARGV[3]) or 0)
local ordinal = tonumber(known[ARGV[1]]:match('^%d+'))
if tonumber(ARGV[2]) > ordinal then
  ordinal, version = tonumber(ARGV[2]), math.max(now, version + 1)
  for i = 6, #ARGV, 2 do
    redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
    redis.call('ZADD', KEYS[2], string.format('%.0f', version), ARGV[i])
  end
end
redis.call('HSET', KEYS[3], 'version', string.format('%.0f', version), ARGV[1], string.format('%d %.0f', ordinal, now))
local silent = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now - life), 'LIMIT', 0, 100)
for _, tenant in ipairs(silent) do
  redis.call('HDEL', KEYS[1], tenant)
  redis.call('ZREM', KEYS[2], tenant)
end
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, math.ceil(life / 1000))
end

local answer = { string.format('%.0f', version), string.format('%d', live) }
if ARGV[3] ~= '' then
  for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[3], '+inf')) do
    answer[#answer + 1] = tenant
    answer[#answer + 1] = redis.call('HGET', KEYS[1], tenant)
  end
end
return answer
