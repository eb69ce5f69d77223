-- Set a part of what is left aside for a replica, which it may spend while it cannot reach the store; instead of what was
-- set aside before. A slice suffices for a request by every limit, or holds no more than the replica keeps.
-- ARGV as in account.lua, the field of the reservation being that of the slice; then, of each limit, what the replica
-- keeps in any case, what it wants, and what one request needs: units.
-- All its limits are of one scope. The figures: what is set aside for it, and what is its due and shall be kept from now on: units.
if lost then return {'LOST'} end
if due() then return {'RECLAIM', due()} end

local SHARE = 0.05 -- of what is left
local slice = record and cmsgpack.unpack(record)
local of, kept, mine, share, suffices = scopes[#scopes], {}, {}, {}, true
for i = 1, n do
  local field = SPEC + i
  local window, scale = spec[field + 2 * n], spec[field + 3 * n]
  local used, at, part, aside = refilled(levels[i], window, spec[field + 4 * n], now)
  mine[i] = slice and slice.amounts[i] or 0
  if slice and slice.forfeited then
    if is_budget(window) and slice.forfeited[i] == at then
      used = max(used - mine[i] * scale, 0)
      note_lost(of.key, spec[field], at, -mine[i] * scale)
    end
  else
    aside = aside - mine[i] * scale
  end
  local wanted, needed = tonumber(ARGV[REST + n + i]), tonumber(ARGV[REST + 2 * n + i])
  local left = max(spec[field + 5 * n] - used - aside, 0) / scale
  share[i] = floor(min(wanted, left * SHARE))
  if share[i] < needed and wanted > 0 and 2 * needed <= left then share[i] = needed end
  suffices = suffices and share[i] >= needed
  kept[i] = {used, at, part, aside}
end

local writes, amounts, total = {{'now', int(now)}, {}}, {}, 0
for i = 1, n do
  if not suffices then share[i] = 0 end
  amounts[i] = max(share[i], min(tonumber(ARGV[REST + i]), mine[i]))
  total = total + amounts[i]
  local used, at, part, aside = unpack(kept[i])
  local level = pack(LEVEL, used, at, part, aside + amounts[i] * spec[SPEC + 3 * n + i])
  append(writes[#scopes], {spec[SPEC + i], level})
end
if total > 0 then
  append(writes[1], {ARGV[6], cmsgpack.pack({amounts = amounts, spec = spec})})
  append(writes[1], enlisted())
elseif record then
  redis.call('HDEL', KEYS[1], ARGV[6])
end
write(writes, true)
append(amounts, share)
return reply('OK', amounts)
