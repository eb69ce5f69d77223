-- Put back what a replica knows and the store does not: the reservations that it holds and, after a loss of state, the
-- figures that it last saw; of two figures the one that leaves less counts.
-- ARGV as in account.lua, then what is charged of the reservations (all; reclaimed: what lua/reclaim.lua gave back; held:
-- concurrency alone, as the figures include the rest), when the figures were seen (us; 0: there are none), the n figures,
-- and for each reservation its field and its record.
local charge, seen, base = ARGV[REST + 1], tonumber(ARGV[REST + 2]), REST + 2
for i = 1, seen > 0 and n or 0 do
  local window, amount = spec[SPEC + 2 * n + i], spec[SPEC + 4 * n + i]
  local at = is_budget(window) and first_day(window, floor(seen / QUARTER)) or seen
  local figure = window == 'held' and 0 or tonumber(ARGV[base + i])
  local last, from, part = refilled(pack(LEVEL, figure, at, 0, 0), window, amount, now)
  local used, _, _, aside = refilled(levels[i], window, amount, now)
  if last > used then levels[i] = pack(LEVEL, last, from, part, aside) end
end

for a = base + n + 1, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[1], ARGV[a]) == 0 then
    local back = opened(ARGV[a + 1])
    cost.c = cost.c + back.asked.c
    if charge == 'all' then cost.r = cost.r + back.asked.r end
    if charge ~= 'held' then
      cost.i, cost.o = cost.i + back.asked.i - back.input, cost.o + back.asked.o - back.output
      cost.cached, cost.open = cost.cached - back.cached, cost.open + back.asked.o
    end
    local mark = redis.call('HGET', KEYS[1], reclaimed(ARGV[a]))
    if mark then -- its requests are booked as it is settled
      book(KEYS[1], row_of(back.spec), -tonumber(mark:match('^%d+')), 0, 0, 0, 0)
      redis.call('HDEL', KEYS[1], reclaimed(ARGV[a]))
    end
    put(KEYS[1], ARGV[a], charge == 'held' and ARGV[a + 1] or charged_on(floor(now / QUARTER), ARGV[a + 1]))
  end
end
cost.t = cost.i + cost.o
local writes, _, after = charged()
append(writes[1], enlisted())
join(writes)
write(writes, true)
return reply('OK', after)
