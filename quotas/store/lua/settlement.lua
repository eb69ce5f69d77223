local MARK_LIFE = 3600e6 -- microseconds after which a replica that is away is not expected to ask any more

-- Marks that stay of a reservation for its replica, which may live on: a later attempt has undone it, or its router
-- concluded it (until when the mark stays); and it was reclaimed (the requests booked for it, and until when).
local function superseded(field) return 'x' .. field:sub(2) end
local function reclaimed(field) return 'g' .. field:sub(2) end

local function opened(text)
  local r, i, o, bi, bc, bo, first, last, late = struct.unpack(RECORD, text)
  return {
    asked = {r = r, i = i, o = o, t = i + o, c = r, cached = 0, open = o, reasoning = 0}, input = bi, cached = bc, output = bo,
    first = first, last = last, late = late, spec = cmsgpack.unpack(text:sub(RECORD_SIZE + 1)),
  }
end

local function charged_on(quarter, text) -- a reservation that is charged again
  return text:sub(1, TIMES_OFFSET) .. pack('<ddd', quarter, quarter, 0) .. text:sub(RECORD_SIZE + 1)
end

-- A budget gets back what was taken from its present period: all of it, or the output that was added late.
local function refundable(record, letter, window, at, refund)
  if not is_budget(window) or first_day(window, record.first) >= at then return refund end
  local late = {r = 0, i = 0, o = record.late, t = record.late, c = 0, cached = 0, open = record.late, reasoning = 0}
  return first_day(window, record.last) >= at and min(refund, counted(late, letter)) or 0
end

local function give_back_to(scope, record, used)
  local spec, n, names, limits = record.spec, record.spec[1], {}, {}
  for i = SPEC + scope.first, SPEC + scope.last do
    if counted(record.asked, spec[i + n]) > counted(used, spec[i + n]) then
      names[#names + 1] = spec[i]
      limits[#limits + 1] = i
    end
  end
  if #names == 0 then return end
  local writes = {}
  for j, level in ipairs(redis.call('HMGET', scope.key, unpack(names))) do
    if level then
      local i, taken, at, part, aside = limits[j], struct.unpack(LEVEL, level)
      local letter = spec[i + n]
      local unused = counted(record.asked, letter) - counted(used, letter)
      local refund = refundable(record, letter, spec[i + 2 * n], at, unused)
      writes[#writes + 1] = names[j]
      writes[#writes + 1] = pack(LEVEL, max(taken - refund * spec[i + 3 * n], 0), at, part, aside)
    end
  end
  if #writes > 0 then redis.call('HSET', scope.key, unpack(writes)) end
end

-- Return all that a reservation took beyond these requests, input, its cached part, output, and its part of reasoning if
-- that is known; what it held, it holds no more.
local function give_back(tenant, record, r, i, cached, o, reasoning)
  local asked = record.asked
  local used = {r = min(r, asked.r), i = min(i, asked.i), o = min(o, asked.o), c = 0, open = 0}
  used.t, used.cached, used.reasoning = used.i + used.o, min(cached, used.i), min(reasoning or 0, used.o)
  for _, scope in ipairs(scopes_of(record.spec, 4, tenant)) do give_back_to(scope, record, used) end
end
