-- Charge a request to every limit of its tenant, key and team, or to none. A repetition of the same id charges nothing.
if lost then return {'LOST'} end
if due() then return {'RECLAIM', due()} end

local writes, before, after, asides, fits = charged()
if record then return reply('OK', before) end
if not fits then
  if was_set_back then -- a refusal writes it, too: from then on a rate refills
    for unit in pairs(cost) do cost[unit] = 0 end
    write((charged()), true)
  end
  append(before, asides)
  return reply('REFUSED', before)
end

local fresh, today = writes[1], floor(now / QUARTER)
local renew = not registered or registered < now + ARGV[2] / 2
if renew then append(fresh, enlisted()) end
put(KEYS[1], ARGV[6], pack(RECORD, cost.r, cost.i, cost.o, 0, 0, 0, today, today, 0) .. ARGV[10])
join(writes)
write(writes, renew)
return reply('OK', after)
