-- Read a response and those before it. KEYS: those of the tenant's responses. ARGV: id, the most that are read.
-- Answers "ok" and the contents of each, the last one first; or "missing", if one is not there, or is too far back.
local now, id, answer = clock(), ARGV[1], { 'ok' }
for _ = 1, tonumber(ARGV[2]) do
  local said = id ~= '' and redis.call('HGET', KEYS[1], id)
  if not said then
    return { 'missing' }
  end
  local expiry, before, contents = said:match('^(%d+) (%S*) (.*)$')
  if tonumber(expiry) <= now then
    return { 'missing' }
  end
  answer[#answer + 1] = contents
  id = before
  if id == '' then
    return answer
  end
end
return #answer > 1 and ARGV[2] == '1' and answer or { 'missing' }
