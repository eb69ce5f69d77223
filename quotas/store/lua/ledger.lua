-- A tenant's ledger of a month, in UTC. A field is of a row (quotas/usage_row.py) and eight days: the number of these days, a
-- space, the row's name. It has an entry for each day of use, in order: the day since 1970, requests, input, cached, output,
-- KV byte seconds, microseconds of the engine, and the output that is reasoning. So a booking writes 58 to 464 bytes, and
-- finds them in a table. The field '#' has the latest day, and how many rows that day has.
local ENTRY, ENTRY_SIZE, DAYS_PER_FIELD, LEDGER_LIFE = '<Hddddddd', 58, 8, 400 * 86400 -- seconds
local NUM_ROWS, NO_ROWS = '<HI4', string.rep('\0', 6)

local function last_day(entries) return entries and struct.unpack('<H', entries, #entries - ENTRY_SIZE + 1) or -1 end

-- Add to what a row has used today, or on the latest day if the clock was set back since. What is taken back is negative. A
-- number before a row's name is how many rows a day has before such rows are summed up.
local function book(tenant, now, row, r, i, c, o, kv, us, reasoning)
  us, reasoning = us or 0, reasoning or 0
  if r == 0 and i == 0 and c == 0 and o == 0 and kv == 0 and us == 0 then return end
  local day = floor(now / DAY)
  local ledger = tenant .. ':ledger:' .. int(day - day_of_month(day))
  local days = int(floor(day / DAYS_PER_FIELD)) .. ' '
  local most, name = row:match('^(%d+) (.*)$')
  local field = days .. (name or row)
  local entries = redis.call('HGET', ledger, field)
  if last_day(entries) < day then
    local latest, count = struct.unpack(NUM_ROWS, redis.call('HGET', ledger, '#') or NO_ROWS)
    if latest < day then latest, count = day, 0 end
    if most and count >= tonumber(most) then
      field = days .. name:match('^[^|]*|[^|]*|[^|]*|') .. '*' .. (name:match('/batch$') or '') -- batches have prices of their own
      entries = redis.call('HGET', ledger, field)
    end
    if last_day(entries) < day then
      entries = (entries or '') .. pack(ENTRY, latest, 0, 0, 0, 0, 0, 0, 0)
      redis.call('HSET', ledger, '#', pack(NUM_ROWS, latest, count + 1))
      redis.call('EXPIRE', ledger, LEDGER_LIFE)
    end
  end
  local before, entry = entries:sub(1, -ENTRY_SIZE - 1), entries:sub(-ENTRY_SIZE)
  local on, br, bi, bc, bo, bkv, bus, bt = struct.unpack(ENTRY, entry)
  local sums = pack(ENTRY, on, br + r, bi + i, bc + c, bo + o, bkv + kv, bus + us, bt + reasoning)
  redis.call('HSET', ledger, field, before .. sums)
end
