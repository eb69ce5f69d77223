-- A tenant's stored responses. Of its two keys the first is a hash: of each response by its id the end of its time
-- (us), the id of the one before it, and its contents; and under "" the bytes of all. The second has all ids by the end
-- of their time.
local function forget(keys, id) -- whether there was one
  local said = redis.call('HGET', keys[1], id)
  if not said or id == '' then
    return false
  end
  redis.call('HDEL', keys[1], id)
  redis.call('ZREM', keys[2], id)
  redis.call('HINCRBY', keys[1], '', -#said)
  return true
end
