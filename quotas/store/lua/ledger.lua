local ENTRY, LEDGER_LIFE = '<ddddd', 400 * 86400 -- seconds

-- Add to what the key of a tenant has used today, in UTC: requests, input, cached, output, KV byte seconds. What is taken
-- back is negative.
local function book(tenant, now, key, r, i, c, o, kv)
  if r == 0 and i == 0 and c == 0 and o == 0 and kv == 0 then return end
  local ledger = tenant .. ':usage:' .. int(floor(now / DAY))
  local entry = redis.call('HGET', ledger, key)
  local br, bi, bc, bo, bkv = 0, 0, 0, 0, 0
  if entry then br, bi, bc, bo, bkv = struct.unpack(ENTRY, entry) end
  redis.call('HSET', ledger, key, pack(ENTRY, br + r, bi + i, bc + c, bo + o, bkv + kv))
  if not entry then redis.call('EXPIRE', ledger, LEDGER_LIFE) end
end
