-- A tenant's ledgers of some days in one answer: a month of 10,000 tenants would be 280,000.
-- KEYS: the tenant's state. ARGV: the first day and the last. Answers the names of the rows, the day to go on from, as the
-- store stands still for no long ledgers, and the entries (lua/ledger.lua), each behind its day and its row's place.
local MOST_ENTRIES = 1000 -- beyond which no further day is read
local places, answer, found, count = {}, {}, {}, 0
local ledger, day, last = KEYS[1] .. ':usage:', tonumber(ARGV[1]), tonumber(ARGV[2])
while day <= last and count < MOST_ENTRIES do
  local words = redis.call('HGETALL', ledger .. day)
  for i = 1, #words, 2 do
    local name, entry = words[i], words[i + 1]
    if not places[name] then
      answer[#answer + 1] = name
      places[name] = #answer
    end
    if #entry < ENTRY_SIZE then entry = entry .. string.rep('\0', ENTRY_SIZE - #entry) end
    count = count + 1
    found[2 * count - 1], found[2 * count] = pack('<I4I4', day, places[name]), entry
  end
  day = day + 1
end
answer[#answer + 1] = int(day)
answer[#answer + 1] = table.concat(found)
return answer
