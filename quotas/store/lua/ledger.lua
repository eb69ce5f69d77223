-- A tenant's ledger of a month, in UTC. A field is of a row (quotas/usage_row.py) and eight days: the number of these days, a
-- space, the row's name. It has an entry for each day of use: the day since 1970, requests, input, cached, output, KV byte
-- seconds, microseconds of the engine, and the output that is reasoning. So a booking writes 58 to 464 bytes, and finds them
-- in a table. The field '#' has how many rows each day has. Both are in the order in which days were first booked, which is
-- that of days unless the clock was set back; so today is the last one, or is looked for.
local ENTRY, ENTRY_SIZE, DAYS_PER_FIELD, LEDGER_LIFE = '<Hddddddd', 58, 8, 400 * 86400 -- seconds
local NUM_ROWS, NUM_ROWS_SIZE = '<HI4', 6

-- The number of bytes before a day's item, which begins with the day; without one, all.
local function bytes_before(items, size, day)
  for at = #items - size, 0, -size do
    if struct.unpack('<H', items, at + 1) == day then return at end
  end
  return #items
end

local function with_item(items, at, item) return items:sub(1, at) .. item .. items:sub(at + #item + 1) end

-- Add to what a row has used today, by the clock alone. What is taken back is negative. A number before a row's name is how
-- many rows a day has before such rows are summed up. Where the ledger is no hash, nothing is booked, which its readers tell.
-- The error is returned, not raised: what the script has written before stays, so that the rest has to follow.
local function book(tenant, row, r, i, c, o, kv, us, reasoning)
  us, reasoning = us or 0, reasoning or 0
  if r == 0 and i == 0 and c == 0 and o == 0 and kv == 0 and us == 0 then return end
  local day = floor(clock() / DAY)
  local ledger = tenant .. ':ledger:' .. int(day - day_of_month(day))
  local days = int(floor(day / DAYS_PER_FIELD)) .. ' '
  local most, name = row:match('^(%d+) (.*)$')
  local field = days .. (name or row)
  local entries = redis.pcall('HGET', ledger, field) or ''
  if type(entries) == 'table' then return entries end
  local at = bytes_before(entries, ENTRY_SIZE, day)
  if at == #entries then
    local counts = redis.call('HGET', ledger, '#') or ''
    local of_day = bytes_before(counts, NUM_ROWS_SIZE, day)
    local count = of_day < #counts and select(2, struct.unpack(NUM_ROWS, counts, of_day + 1)) or 0
    if most and count >= tonumber(most) then
      field = days .. name:match('^[^|]*|[^|]*|[^|]*|') .. '*' .. (name:match('/batch$') or '') -- batches have prices of their own
      entries = redis.call('HGET', ledger, field) or ''
      at = bytes_before(entries, ENTRY_SIZE, day)
    end
    if at == #entries then
      entries = entries .. pack(ENTRY, day, 0, 0, 0, 0, 0, 0, 0)
      redis.call('HSET', ledger, '#', with_item(counts, of_day, pack(NUM_ROWS, day, count + 1)))
      redis.call('EXPIRE', ledger, LEDGER_LIFE)
    end
  end
  local _, br, bi, bc, bo, bkv, bus, bt = struct.unpack(ENTRY, entries, at + 1)
  local sums = pack(ENTRY, day, br + r, bi + i, bc + c, bo + o, bkv + kv, bus + us, bt + reasoning)
  redis.call('HSET', ledger, field, with_item(entries, at, sums))
end
