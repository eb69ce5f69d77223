local function keep(key, ms) -- for at least this time; a longer life is left
  if redis.call('PTTL', key) < tonumber(ms) then redis.call('PEXPIRE', key, ms) end
end
