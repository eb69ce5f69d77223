-- Lease KV memory of a tenant to a replica, instead of what it leased before: as much as it wants and others leave.
-- KEYS: the tenant's KV leases. ARGV: replica, bytes wanted, bytes that all may hold, life of the lease (us).
local now, others = clock(), 0
local leases = redis.call('HGETALL', KEYS[1])
for i = 1, #leases, 2 do
  local bytes, expiry = leases[i + 1]:match('^(%d+) (%d+)$')
  if leases[i] ~= ARGV[1] then
    if tonumber(expiry) <= now then
      redis.call('HDEL', KEYS[1], leases[i])
    else
      others = others + bytes
    end
  end
end
local granted = math.max(0, math.min(tonumber(ARGV[2]), ARGV[3] - others))
if granted > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %d', granted, now + ARGV[4]))
  keep(KEYS[1], math.ceil(ARGV[4] / 1000))
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return {string.format('%d', granted)}
