-- Change fields of a batch. KEYS: the batch, the set of open ones, the tenant's files. ARGV: id; the caller's epoch, '' of none; how long its
-- lease lasts from now on (us), '' to leave it, '0' to give it back; the statuses from which it may be changed, each
-- between commas, '' of any; for how long it is kept once it is closed (us), '' if it stays open; fields and values.
-- Answers "ok", or "stale" if the batch is not there, not in such a status, or another's by now.
local epoch, status = unpack(redis.call('HMGET', KEYS[1], 'epoch', 'status'))
if not status or (ARGV[2] ~= '' and ARGV[2] ~= epoch) then return {'stale'} end
if ARGV[4] ~= '' and not ARGV[4]:find(',' .. status .. ',', 1, true) then return {'stale'} end
if #ARGV > 5 then redis.call('HSET', KEYS[1], unpack(ARGV, 6)) end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'lease', string.format('%.0f', clock() + ARGV[3])) end
if ARGV[5] ~= '' then
  redis.call('SREM', KEYS[2], ARGV[1])
  redis.call('DEL', KEYS[1] .. ':lines')
  local held = redis.call('HGET', KEYS[1], 'result_bytes') -- counted by the files that have them from now on
  if held then
    redis.pcall('HINCRBY', KEYS[3], '', -held) -- or, with a damaged sum, the batch would be kept for ever
    redis.call('HDEL', KEYS[1], 'result_bytes')
  end
  redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[5] / 1000))
end
return {'ok'}
