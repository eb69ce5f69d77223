local function levels_of(tenant, slice)
  local _, own, key = unpack(slice.spec, 1, SPEC)
  return own > 0 and tenant or tenant .. ':key:' .. key
end

-- Give a slice (lua/slice.lua) back, of which nothing was spent. A level that has expired has forgotten the slice.
local function give_up(tenant, slice, now)
  local spec, n, levels = slice.spec, slice.spec[1], levels_of(tenant, slice)
  for i = SPEC + 1, SPEC + n do
    local window, amount = spec[i + 2 * n], slice.amounts[i - SPEC] * spec[i + 3 * n]
    local level = redis.call('HGET', levels, spec[i])
    local used, at, part, aside = refilled(level, window, spec[i + 4 * n], now)
    if not slice.forfeited then
      aside = max(aside - amount, 0)
    elseif is_budget(window) and slice.forfeited[i - SPEC] == at then
      used = max(used - amount, 0)
      note_lost(levels, spec[i], at, -amount)
    end
    if level then redis.call('HSET', levels, spec[i], pack(LEVEL, used, at, part, aside)) end
  end
end

local NEVER = -1 -- no period begins on this day

-- Count a slice as spent: its replica may have spent it, and cannot tell. What is held at once is free again. If the
-- replica comes back, a budget gets back what it did not spend.
local function forfeit(tenant, slice, now)
  local spec, n, levels = slice.spec, slice.spec[1], levels_of(tenant, slice)
  slice.forfeited = {}
  for i = SPEC + 1, SPEC + n do
    local window, amount = spec[i + 2 * n], slice.amounts[i - SPEC] * spec[i + 3 * n]
    local level = redis.call('HGET', levels, spec[i])
    local used, at, part, aside = refilled(level, window, spec[i + 4 * n], now)
    if window ~= 'held' then used = used + amount end
    slice.forfeited[i - SPEC] = level and at or NEVER
    if level then
      redis.call('HSET', levels, spec[i], pack(LEVEL, used, at, part, max(aside - amount, 0)))
      if is_budget(window) then note_lost(levels, spec[i], at, amount) end
    end
  end
  slice.ended = now
  return cmsgpack.pack(slice)
end
