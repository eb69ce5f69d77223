-- Settle a line of a batch once, for the holder of the batch's lease: mark it done, charge its tokens, also beyond the
-- limits, and book its use. ARGV as in account.lua; then batch, epoch, line, "completed" or "failed", requests, cached, KV
-- byte seconds, reasoning tokens. Answers "OK" also the second time, and "STALE" to one who has lost the lease.
if lost then return {'LOST'} end
local batch = KEYS[1] .. ':batch:' .. ARGV[REST + 1]
local epoch, line, how, cached = ARGV[REST + 2], ARGV[REST + 3], ARGV[REST + 4], tonumber(ARGV[REST + 6])
cost.cached = cached
local writes, before, after = charged()
if redis.call('HGET', batch, 'epoch') ~= epoch then return reply('STALE', before) end
if redis.call('HSETNX', batch .. ':lines', line, epoch .. ' ' .. how) == 0 then return reply('OK', before) end
redis.call('HINCRBY', batch, how, 1)
redis.call('HINCRBY', batch, 'input_tokens', cost.i)
redis.call('HINCRBY', batch, 'output_tokens', cost.o)
redis.call('HINCRBY', batch, 'cached_tokens', cached)
redis.call('HINCRBY', batch, 'reasoning_tokens', ARGV[REST + 8])
book(KEYS[1], now, row_of(cmsgpack.unpack(ARGV[10])), tonumber(ARGV[REST + 5]), cost.i, cached, cost.o, tonumber(ARGV[REST + 7]))
write(writes, true)
return reply('OK', after)
