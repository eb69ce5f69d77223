-- What a call is about. KEYS: the tenant's state; the levels of its API key, where that has limits.
-- ARGV: 1 spec of the limits (lua/spec.lua), 2 lease (us), 3 life of the keys (ms), 4 field of the replica,
-- 5 generation, 6 field of the reservation, 7 requests, 8 input, 9 output, 10 the spec as a reservation keeps it.
local REST = 10 -- the arguments of a script's own follow
local spec = cmsgpack.unpack(ARGV[1])
local n, own = spec[1], spec[2]
local cost = {r = tonumber(ARGV[7]), i = tonumber(ARGV[8]), o = tonumber(ARGV[9]), c = tonumber(ARGV[7]), cached = 0}
cost.t = cost.i + cost.o

local held =
  redis.call('HMGET', KEYS[1], ARGV[6], 'now', 'generation', 'lease', ARGV[4], unpack(spec, SPEC + 1, SPEC + own))
if n > own then
  for i, level in ipairs(redis.call('HMGET', KEYS[2], unpack(spec, SPEC + own + 1, SPEC + n))) do
    held[5 + own + i] = level
  end
end
local record, generation, lease, registered = held[1], held[3], tonumber(held[4]), tonumber(held[5])
local now = max(clock(), tonumber(held[2] or 0))
local lost = ARGV[5] ~= '' and ARGV[5] ~= generation

-- With `cost` charged: fields to write into each key, figures before and after, what is set aside of each limit, and
-- whether every charged limit holds.
local function charged()
  local writes, before, after, asides, fits = {{'now', int(now)}, {}}, {}, {}, {}, true
  for i = 1, n do
    local field = SPEC + i
    local used, at, part, aside = refilled(held[5 + i], spec[field + 2 * n], spec[field + 4 * n], now)
    local more = counted(cost, spec[field + n]) * spec[field + 3 * n]
    fits = fits and (more == 0 or used + aside + more <= spec[field + 5 * n])
    before[i], after[i], asides[i] = used, used + more, aside
    local write, last = writes[i > own and 2 or 1], i > own and 2 * (i - own) or 2 + 2 * i
    write[last - 1], write[last] = spec[field], pack(LEVEL, used + more, at, part, aside)
  end
  return writes, before, after, asides, fits
end

local function write(writes, outlive) -- the tenant's state gets its life anew with `outlive`, its key's levels always
  redis.call('HSET', KEYS[1], unpack(writes[1]))
  if outlive then keep(KEYS[1], ARGV[3]) end
  if n > own then
    redis.call('HSET', KEYS[2], unpack(writes[2]))
    keep(KEYS[2], ARGV[3])
  end
end

-- Fields that renew this replica's lease, and the earliest of all leases; the first of them begins a life of the state.
local function enlisted()
  local expiry = now + ARGV[2]
  generation = generation or ARGV[6]
  return {'generation', generation, ARGV[4], int(expiry), 'lease', int(min(lease or expiry, expiry))}
end

local function append(list, more)
  for _, entry in ipairs(more) do list[#list + 1] = entry end
end

local function reply(status, figures) -- the figures follow the time, as doubles
  return {status, generation, pack('<d' .. string.rep('d', #figures), now, unpack(figures))}
end
