-- A reservation: nine doubles, then the spec of its limits. Requests, input and output asked; input, cached and output
-- booked; quarters of an hour in which it was charged: the first, the last, and how much output late in the last.
local RECORD, TIMES_OFFSET, RECORD_SIZE = '<ddddddddd', 48, 72

-- q:<request> names the fields of the reservations of a request's attempts, by which a retry or its router finds them.
local function indexed(state, field) -- its name, and the fields that it has; nil of a request that no router sent
  local request = field:match('^r:%x+%.%d+%.(%x+)$')
  if request then return 'q:' .. request, redis.call('HGET', state, 'q:' .. request) or '' end
end

local function put(state, field, text)
  local index, fields = indexed(state, field)
  redis.call('HSET', state, field, text, unpack(index and {index, fields .. field .. ' '} or {}))
end

local function remove(state, field)
  local index, fields = indexed(state, field)
  redis.call('HDEL', state, field)
  if not index then return end
  local first, last = fields:find(field .. ' ', 1, true)
  local others = first and fields:sub(1, first - 1) .. fields:sub(last + 1) or fields
  if others == '' then redis.call('HDEL', state, index) else redis.call('HSET', state, index, others) end
end

local function attempts(state, request) -- the field and the record of each reservation of a request
  local found = {}
  for field in (redis.call('HGET', state, 'q:' .. request) or ''):gmatch('%S+') do
    local text = redis.call('HGET', state, field)
    if text then found[field] = text else remove(state, field) end -- an older version has settled it
  end
  return pairs(found)
end
