-- Charge and book use during an outage of the store, also beyond the limits: once for each ordinal of a sender.
-- ARGV as in account.lua, the field of the reservation being that of the sender; then ordinal, cached, KV byte seconds,
-- reasoning.
if lost then return {'LOST'} end
local booked = KEYS[1] .. ':booked'
cost.c, cost.cached, cost.open, cost.reasoning = 0, tonumber(ARGV[REST + 2]), 0, tonumber(ARGV[REST + 4])
local writes, before, after = charged()
if tonumber(redis.call('HGET', booked, ARGV[6]) or 0) >= tonumber(ARGV[REST + 1]) then return reply('OK', before) end
local row, kv = row_of(cmsgpack.unpack(ARGV[10])), tonumber(ARGV[REST + 3])
book(KEYS[1], row, cost.r, cost.i, cost.cached, cost.o, kv, 0, cost.reasoning)
redis.call('HSET', booked, ARGV[6], ARGV[REST + 1])
redis.call('EXPIRE', booked, 86400)
write(writes, true)
return reply('OK', after)
