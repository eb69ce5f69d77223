-- Add what a replica has served to the sums of all, once for each ordinal, and tell it which sums have changed.
-- KEYS: the sums by tenant, the versions in which they changed, the replicas. ARGV: replica, ordinal, version that it
-- read last ('': none), time in which a replica counts and in which silence is remembered (us); then tenant, served ...
local now, counts, life, at_once = clock(), tonumber(ARGV[4]), tonumber(ARGV[5]), 1000
local function whole(number) return string.format('%.0f', number) end
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
local ordinal, heard = known[ARGV[1]]:match('^(%d+) (%d+)$')
local adds = tonumber(ARGV[2]) > tonumber(ordinal)
if adds then
  version = math.max(now, version + 1)
  for first = 6, #ARGV, 2 * at_once do
    local last, tenants, sums, versions = math.min(#ARGV, first + 2 * at_once - 1), {}, {}, {}
    for i = first, last, 2 do
      tenants[#tenants + 1] = ARGV[i]
    end
    local before = redis.call('HMGET', KEYS[1], unpack(tenants))
    for i, tenant in ipairs(tenants) do
      sums[2 * i - 1], sums[2 * i] = tenant, whole((tonumber(before[i] or 0)) + ARGV[first + 2 * i - 1])
      versions[2 * i - 1], versions[2 * i] = whole(version), tenant
    end
    redis.call('HSET', KEYS[1], unpack(sums))
    redis.call('ZADD', KEYS[2], unpack(versions))
  end
end
if adds or version ~= tonumber(known.version) or tonumber(heard) < now - counts / 4 then
  redis.call('HSET', KEYS[3], 'version', whole(version), ARGV[1], ARGV[2] .. ' ' .. whole(now))
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, math.ceil(life / 1000))
  end
end
local silent = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', whole(now - life), 'LIMIT', 0, 100)
for _, tenant in ipairs(silent) do
  redis.call('HDEL', KEYS[1], tenant)
  redis.call('ZREM', KEYS[2], tenant)
end

local answer = { whole(version), string.format('%d', live) }
if ARGV[3] ~= '' then
  local changed = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[3], '+inf')
  for first = 1, #changed, at_once do
    local last = math.min(#changed, first + at_once - 1)
    for i, sum in ipairs(redis.call('HMGET', KEYS[1], unpack(changed, first, last))) do
      answer[#answer + 1] = changed[first + i - 1]
      answer[#answer + 1] = sum
    end
  end
end
return answer
