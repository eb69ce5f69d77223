-- The responses of a tenant that are computed in the background. KEYS: a hash of their leases by id: until when one lasts
-- (us), and its state, "ok", "running" or "cancelled". ARGV: id, what is asked ("open", "hold", "run", "look", "cancel",
-- "close"), how long the lease lasts (us), the most open ones. Answers the state, "full", or "lost" if there is no such
-- lease: one that is over is forgotten by the first who looks, so that its holder finds it lost as well.
local now, id, asked = clock(), ARGV[1], ARGV[2]
if asked == 'close' then
  redis.call('HDEL', KEYS[1], id)
  return { 'ok' }
end
local is_holder = asked == 'hold' or asked == 'run'
if not is_holder then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 2, #all, 2 do
    if tonumber(all[i]:match('^%d+')) <= now then
      redis.call('HDEL', KEYS[1], all[i - 1])
    end
  end
end
local until_when, state = string.format('%.0f', now + ARGV[3]), 'ok'
if asked == 'open' then
  if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) and redis.call('HEXISTS', KEYS[1], id) == 0 then
    return { 'full' }
  end
else
  local said = redis.call('HGET', KEYS[1], id)
  if not said then
    return { 'lost' }
  end
  local lease, found = said:match('^(%d+) (%a+)$')
  state = asked == 'cancel' and 'cancelled' or (asked == 'run' and found == 'ok') and 'running' or found
  if not is_holder then
    until_when = lease
  end
end
if asked ~= 'look' then
  redis.call('HSET', KEYS[1], id, until_when .. ' ' .. state)
  keep(KEYS[1], math.ceil(2 * ARGV[3] / 1000))
end
return { state }
