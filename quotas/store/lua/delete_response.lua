-- Delete a response. KEYS: those of the tenant's responses. ARGV: id. Answers "ok", also if it was deleted a moment ago,
-- or "missing".
if forget(KEYS, ARGV[1]) then
  done(KEYS[1], ARGV[1])
  return { 'ok' }
end
return { was_done(KEYS[1], ARGV[1]) and 'ok' or 'missing' }
