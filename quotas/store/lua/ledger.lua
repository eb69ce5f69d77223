local ENTRY, ENTRY_SIZE, LEDGER_LIFE = '<ddddddd', 56, 400 * 86400 -- seconds

-- Add to what a row of a tenant's ledger has used today, in UTC: requests, input, cached, output, KV byte seconds, and if
-- any, microseconds of the engine and the output that is reasoning. What is taken back is negative. A row is named as
-- quotas/usage_row.py says; a number before its name is how many rows the ledger has before such rows are summed up.
local function book(tenant, now, row, r, i, c, o, kv, us, reasoning)
  us, reasoning = us or 0, reasoning or 0
  if r == 0 and i == 0 and c == 0 and o == 0 and kv == 0 and us == 0 then return end
  local ledger = tenant .. ':usage:' .. int(floor(now / DAY))
  local most, name = row:match('^(%d+) (.*)$')
  name = name or row
  local entry = redis.call('HGET', ledger, name)
  if most and not entry and redis.call('HLEN', ledger) >= tonumber(most) then
    name = name:match('^[^|]*|[^|]*|[^|]*|') .. '*' .. (name:match('/batch$') or '') -- use in batches has prices of its own
    entry = redis.call('HGET', ledger, name)
  end
  local booked = entry or '' -- an entry of before reasoning was counted is shorter
  local br, bi, bc, bo, bkv, bus, bt = struct.unpack(ENTRY, booked .. string.rep('\0', ENTRY_SIZE - #booked))
  local sums = pack(ENTRY, br + r, bi + i, bc + c, bo + o, bkv + kv, bus + us, bt + reasoning)
  redis.call('HSET', ledger, name, sums)
  if not entry then redis.call('EXPIRE', ledger, LEDGER_LIFE) end
end
