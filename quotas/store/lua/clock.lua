local present
local function clock() -- microseconds, the same throughout a script
  if not present then
    local time = redis.call('TIME')
    present = time[1] * 1e6 + time[2]
  end
  return present
end
