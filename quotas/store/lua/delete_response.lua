-- Delete a response. KEYS: those of the tenant's responses. ARGV: id. Answers "ok" or "missing".
return { forget(KEYS, ARGV[1]) and 'ok' or 'missing' }
