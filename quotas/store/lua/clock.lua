local function clock() -- microseconds
  local time = redis.call('TIME')
  return time[1] * 1e6 + time[2]
end
