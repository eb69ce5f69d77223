-- Renew a replica's lease and book the progress of its reservations; those that are not here are named in the answer.
-- KEYS: the tenant's state. ARGV: generation, field of the replica, lease (us), least life of the keys (ms), then for
-- each reservation its field and, so far, input, cached and output.
local generation, last_seen, lease = unpack(redis.call('HMGET', KEYS[1], 'generation', 'now', 'lease'))
if ARGV[1] ~= generation then return {'LOST'} end
local now, unknown, kept = max(clock(), tonumber(last_seen or 0)), {'OK'}, {[KEYS[1]] = ARGV[4]}
for a = 5, #ARGV, 4 do
  local text = redis.call('HGET', KEYS[1], ARGV[a])
  if text then
    local record = opened(text)
    local i, c, o = max(ARGV[a + 1], record.input), max(ARGV[a + 2], record.cached), max(ARGV[a + 3], record.output)
    book(KEYS[1], row_of(record.spec), 0, i - record.input, c - record.cached, o - record.output, 0)
    local asked = record.asked
    for _, scope in ipairs(scopes_of(record.spec, 4, KEYS[1], ARGV[4])) do kept[scope.key] = scope.life end
    local head = pack(RECORD, asked.r, asked.i, asked.o, i, c, o, record.first, record.last, record.late)
    redis.call('HSET', KEYS[1], ARGV[a], head .. text:sub(RECORD_SIZE + 1))
  elseif redis.call('HEXISTS', KEYS[1], superseded(ARGV[a])) == 0 then
    unknown[#unknown + 1] = ARGV[a]
  end
end
local expiry = now + ARGV[3]
redis.call('HSET', KEYS[1], 'now', int(now), ARGV[2], int(expiry), 'lease', int(min(tonumber(lease) or expiry, expiry)))
for key, life in pairs(kept) do keep(key, life) end
return unknown
