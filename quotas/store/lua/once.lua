-- What a tenant's latest calls did, by tokens in a ring, for a minute: a call that is sent again, because its answer was
-- lost, is told what it did.
local TOKENS, TOKEN_LIFE_MS = 256, 60000

local function was_done(state, token)
  local all = redis.call('HGETALL', state .. ':done')
  for i = 2, #all, 2 do
    if all[i] == token and all[i - 1] ~= '' then return true end
  end
  return false
end

local function done(state, token)
  local key = state .. ':done'
  redis.call('HSET', key, redis.call('HINCRBY', key, '', 1) % TOKENS, token)
  redis.call('PEXPIRE', key, TOKEN_LIFE_MS)
end
