-- Charge a request to every limit of its tenant and key, or to none. A repetition of the same id charges nothing.
if lost then return {'LOST'} end
if lease and now >= lease then return {'RECLAIM'} end

local writes, before, after, fits = charged()
if record then return reply('OK', before) end
if not fits then return reply('REFUSED', before) end

local fresh, today, expiry = writes[1], floor(now / DAY), now + ARGV[2]
fresh[#fresh + 1] = ARGV[6]
fresh[#fresh + 1] = pack(RECORD, cost.r, cost.i, cost.o, 0, 0, 0, today, today, 0) .. ARGV[10]
local renew = not registered or registered < expiry - ARGV[2] / 2
if renew then -- its replica's lease, and the earliest of all leases
  generation = generation or ARGV[6]
  local words = {'generation', generation, ARGV[4], int(expiry), 'lease', int(min(lease or expiry, expiry))}
  for _, word in ipairs(words) do fresh[#fresh + 1] = word end
end
write(writes, renew)
return reply('OK', after)
