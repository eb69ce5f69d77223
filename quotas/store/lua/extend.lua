-- Raise the output of a reservation to ARGV[9] in all, charged to every limit or to none.
if lost then return {'LOST'} end
if not record then return {'GONE'} end
local r, i, o, bi, bc, bo, first, last, late = struct.unpack(RECORD, record)
local more, today = max(ARGV[9] - o, 0), floor(now / QUARTER)
cost = {r = 0, i = 0, o = more, t = more, c = 0, cached = 0, open = more, reasoning = 0}

local writes, before, after, asides, fits = charged()
if more == 0 then return reply('OK', before) end
if not fits then
  append(before, asides)
  return reply('REFUSED', before)
end

if today ~= first then
  late = (today == last and late or 0) + more
  last = today
end
local fresh = writes[1]
fresh[#fresh + 1] = ARGV[6]
fresh[#fresh + 1] = pack(RECORD, r, i, o + more, bi, bc, bo, first, last, late) .. record:sub(RECORD_SIZE + 1)
write(writes, true)
return reply('OK', after)
