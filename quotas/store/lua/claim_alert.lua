-- Take it upon a replica to send an alert of a budget, which one replica does in each period, and another if that one is
-- gone. KEYS: the hash with the level of the budget. ARGV: field of the alert, first day of the period, for how long the
-- claim holds (us). Answers "yes", "no" while another replica has it, or "done" once it was sent or given up.
local now, day, period, holds = clock(), tonumber(ARGV[2]), nil, nil
local said = redis.call('HGET', KEYS[1], ARGV[1])
if said then period, holds = said:match('^(-?%d+) (%S+)$') end
if period and tonumber(period) >= day then
  if not tonumber(holds) then return {'done'} end
  if now < tonumber(holds) then return {'no'} end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. string.format('%.0f', now + ARGV[3]))
return {'yes'}
