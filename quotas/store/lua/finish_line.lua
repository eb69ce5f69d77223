-- Settle a line of a batch once, for the holder of the batch's lease: mark it done, charge its tokens, also beyond the
-- limits, and book its use. ARGV as in account.lua; then batch, epoch, line, "completed" or "failed", requests, cached, KV
-- byte seconds, reasoning tokens, bytes of the result, and the letter of money at the prices of batches ('': none).
-- Answers "OK" also the second time, and "STALE" to one who has lost the lease.
if lost then return {'LOST'} end
local batch = KEYS[1] .. ':batch:' .. ARGV[REST + 1]
local epoch, line, how, cached = ARGV[REST + 2], ARGV[REST + 3], ARGV[REST + 4], tonumber(ARGV[REST + 6])
cost.cached, cost.open, cost.reasoning = cached, 0, tonumber(ARGV[REST + 8])
for i = SPEC + n + 1, SPEC + 2 * n do
  if spec[i]:sub(1, 1) == 'm' then spec[i] = ARGV[REST + 10] end
end
local writes, before, after = charged()
if redis.call('HGET', batch, 'epoch') ~= epoch then return reply('STALE', before) end
if redis.call('HSETNX', batch .. ':lines', line, epoch .. ' ' .. how) == 0 then return reply('OK', before) end
redis.call('HINCRBY', batch, how, 1)
redis.call('HINCRBY', batch, 'input_tokens', cost.i)
redis.call('HINCRBY', batch, 'output_tokens', cost.o)
redis.call('HINCRBY', batch, 'cached_tokens', cached)
redis.call('HINCRBY', batch, 'reasoning_tokens', ARGV[REST + 8])
redis.call('HINCRBY', batch, 'result_bytes', ARGV[REST + 9])
redis.pcall('HINCRBY', KEYS[1] .. ':files', '', ARGV[REST + 9]) -- a damaged sum of files lets no line go free of charge
local row = row_of(cmsgpack.unpack(ARGV[10])) .. '/batch'
book(KEYS[1], row, tonumber(ARGV[REST + 5]), cost.i, cached, cost.o, tonumber(ARGV[REST + 7]), 0, cost.reasoning)
write(writes, true)
return reply('OK', after)
