-- Note that a replica is there until its time is over, or that it has left, and name all that are there.
-- KEYS: the replicas of a fleet. ARGV: the replica ('': none), time for which it is there (us; 0: it has left), what it
-- says of itself. Answers since when there is such a list, then what each says, the earliest to go first.
local now, life = clock(), tonumber(ARGV[2])
if ARGV[1] ~= '' and life > 0 then
  redis.call('HSETNX', KEYS[1], 'since', string.format('%.0f', now))
  redis.call('HSET', KEYS[1], 'r:' .. ARGV[1], string.format('%.0f ', now + life) .. ARGV[3])
  keep(KEYS[1], math.ceil(life / 1000))
elseif ARGV[1] ~= '' then
  redis.call('HDEL', KEYS[1], 'r:' .. ARGV[1])
end

local all, there, since = redis.call('HGETALL', KEYS[1]), {}, ''
for i = 1, #all, 2 do
  local expiry, said = all[i + 1]:match('^(%d+) (.*)$')
  if all[i] == 'since' then
    since = all[i + 1]
  elseif expiry and tonumber(expiry) > now then
    there[#there + 1] = { expiry = tonumber(expiry), said = said }
  else
    redis.call('HDEL', KEYS[1], all[i])
  end
end
table.sort(there, function(a, b) return a.expiry < b.expiry end)
local answer = { since }
for i, one in ipairs(there) do
  answer[i + 1] = one.said
end
return answer
