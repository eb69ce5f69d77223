-- What a call is about. KEYS: the tenant's state; the keys of the levels of its other scopes (lua/spec.lua).
-- ARGV: 1 spec of the limits (lua/spec.lua), 2 lease (us), 3 life of the keys (ms), 4 field of the replica,
-- 5 generation, 6 field of the reservation, 7 requests, 8 input, 9 output, 10 the spec as a reservation keeps it.
local REST = 10 -- the arguments of a script's own follow
local spec = cmsgpack.unpack(ARGV[1])
local n, scopes = spec[1], scopes_of(spec, 6, KEYS[1], ARGV[3])
local cost = {r = tonumber(ARGV[7]), i = tonumber(ARGV[8]), o = tonumber(ARGV[9]), c = tonumber(ARGV[7]), cached = 0, reasoning = 0}
cost.t, cost.open = cost.i + cost.o, cost.o

local held =
  redis.call('HMGET', KEYS[1], ARGV[6], 'now', 'generation', 'lease', ARGV[4], unpack(spec, SPEC + 1, SPEC + spec[2]))
local record, generation, lease, registered = held[1], held[3], tonumber(held[4]), tonumber(held[5])
local now = max(clock(), tonumber(held[2] or 0))
local lost = ARGV[5] ~= '' and ARGV[5] ~= generation
local member = 't:' .. KEYS[1] -- in the state of a shared scope: until when its reservations need not be reclaimed

local levels = {unpack(held, 6)}
for s = 2, #scopes do
  local scope = scopes[s]
  local first, last = SPEC + scope.first, SPEC + scope.last
  local found = redis.call('HMGET', scope.key, 'now', 'lease', member, unpack(spec, first, last))
  for i = scope.first, scope.last do levels[i] = found[4 + i - scope.first] end
  now = max(now, tonumber(found[1] or 0))
  scope.lease, scope.is_member = tonumber(found[2]), found[3]
end

local function due() -- the key of a state in which reservations or slices of lost replicas may be; nil if there is none
  for s, scope in ipairs(scopes) do
    local expiry = scope.lease
    if s == 1 then expiry = lease end
    if expiry and now >= expiry then return scope.key end
  end
end

-- With `cost` charged: fields to write for each scope, figures before and after, what is set aside of each limit, and
-- whether every charged limit holds.
local function charged()
  local writes, before, after, asides, fits = {}, {}, {}, {}, true
  for s, scope in ipairs(scopes) do
    local write, last = {}, 0
    if s == 1 or scope.is_shared then write[1], write[2], last = 'now', int(now), 2 end
    for i = scope.first, scope.last do
      local field = SPEC + i
      local used, at, part, aside = refilled(levels[i], spec[field + 2 * n], spec[field + 4 * n], now)
      local more = counted(cost, spec[field + n]) * spec[field + 3 * n]
      fits = fits and (more == 0 or used + aside + more <= spec[field + 5 * n])
      before[i], after[i], asides[i] = used, used + more, aside
      last = last + 2
      write[last - 1], write[last] = spec[field], pack(LEVEL, used + more, at, part, aside)
    end
    writes[s] = write
  end
  return writes, before, after, asides, fits
end

local function write(writes, outlive) -- states get their life anew with `outlive`, a key's levels always
  for s, scope in ipairs(scopes) do
    redis.call('HSET', scope.key, unpack(writes[s]))
    if outlive or (s > 1 and not scope.is_shared) then keep(scope.key, scope.life) end
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

-- Note in the shared scopes that the tenant has reservations, which are reclaimed for them when its lease has run out.
local function join(writes)
  local expiry = lease or now + ARGV[2]
  for s, scope in ipairs(scopes) do
    if scope.is_shared and not (scope.is_member and scope.lease) then
      append(writes[s], {member, int(expiry), 'lease', int(min(scope.lease or expiry, expiry))})
    end
  end
end

local function reply(status, figures) -- the figures follow the time, as doubles
  return {status, generation, pack('<d' .. string.rep('d', #figures), now, unpack(figures))}
end
