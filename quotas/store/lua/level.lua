-- A level is how much of one limit is used: four doubles used, at, part, aside that only hold integers below 2^53:
--   Rate     used: 1/seconds of a unit; at: microsecond it was refilled; part: 1e-6 of such a fraction refilled beyond
--   Budget   used: units; at: first day of the period they count in; part: 0. After an edit of the calendar
--            it may begin on an earlier day, with what was used
--   held     used: units; at, part: 0
-- aside: what replicas may spend of it without asking, in the units of used (lua/slice.lua)
local LEVEL, DAY, QUARTER = '<dddd', 86400e6, 900e6 -- microseconds; the days of every time zone begin with a quarter hour
local floor, max, min, pack = math.floor, math.max, math.min, struct.pack

local function int(x) return string.format('%.0f', x) end

local function day_of_month(day) -- 0-based; civil_from_days of H. Hinnant, "chrono-compatible low-level date algorithms"
  local doe = (day + 719468) % 146097
  local yoe = floor((doe - floor(doe / 1460) + floor(doe / 36524) - floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + floor(yoe / 4) - floor(yoe / 100))
  return doy - floor((153 * floor((5 * doy + 2) / 153) + 2) / 5)
end

local PLAIN = {day = true, week = true, month = true} -- budgets in UTC with weeks that begin on Monday

local function is_budget(window)
  return PLAIN[window] or (type(window) == 'string' and window ~= 'held')
end

-- The first day of the period of a budget that contains this quarter of an hour. In the window of one that is not plain
-- the first weekday (0: Monday), the zone's offset and later ones, each with the quarter from which on it holds, follow:
-- week/6/4,1971236:8. Offsets are in quarters.
local function first_day(window, quarter)
  if window == 'session' then return 0 end -- which ends when its level is forgotten
  local period, starts, offset = window, 0, 0
  if not PLAIN[window] then
    local later
    period, starts, offset, later = window:match('^(%a+)/(%d)/(-?%d+)(.*)$')
    for from, following in later:gmatch(',(%d+):(-?%d+)') do
      if quarter < tonumber(from) then break end
      offset = following
    end
  end
  local day = floor((quarter + offset) / 96)
  if period == 'week' then return day - (day + 3 - starts) % 7 end
  if period == 'month' then return day - day_of_month(day) end
  return day
end

local LOST = '<dd'

-- Note how much of a budget counts as spent because replicas were lost, in the period that began on the day `at`.
local function note_lost(key, name, at, amount)
  local field, from, sum = 'lost:' .. name, at, 0
  local noted = redis.call('HGET', key, field)
  if noted then from, sum = struct.unpack(LOST, noted) end
  sum = max((from == at and sum or 0) + amount, 0)
  if sum > 0 then redis.call('HSET', key, field, pack(LOST, at, sum)) else redis.call('HDEL', key, field) end
end

local was_set_back = false -- the clock, since some rate was refilled

local function refilled(level, window, amount, now) -- the window of a Rate is its seconds
  local used, at, part, aside = 0, 0, 0, 0
  if level then used, at, part, aside = struct.unpack(LEVEL, level) end
  if window == 'held' then return used, 0, 0, aside end
  if is_budget(window) then
    local first = first_day(window, floor(now / QUARTER))
    return at >= first and used or 0, first, 0, aside
  end
  now = clock() -- not the latest time seen: a rate would stand still for as long as the clock was set back
  was_set_back = was_set_back or now < at
  local elapsed = max(now - at, 0)
  part = part + elapsed % 1e6 * amount
  used = used - floor(elapsed / 1e6) * amount - floor(part / 1e6)
  if used <= 0 then return 0, now, 0, aside end
  return used, now, part % 1e6, aside
end
