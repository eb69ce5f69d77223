-- Limits, in MessagePack: how many, how many of them are the tenant's own, the key's name, then columns: field, letter of
-- what is counted, window, scale, amount, capacity (scaled). The tenant's own limits stand first. A reservation keeps the
-- first four columns, and behind them the row of the ledger in which its use is booked.
-- Letters: r requests, i input, o output, t tokens, c concurrent requests; m is money, in billionths, and its prices of a
-- token follow: m<input>,<cached input>,<output>.
local SPEC = 3

-- The row of a reservation's use; an older version kept none.
local function row_of(spec) return spec[SPEC + 4 * spec[1] + 1] or spec[SPEC] end

-- How much a limit of this letter counts of requests r and c, tokens i, o and t, and the cached part of i.
local function counted(amounts, letter)
  local found = amounts[letter]
  if found then return found end
  local input, cached, output = letter:match('^m(%d+),(%d+),(%d+)$')
  return input * (amounts.i - amounts.cached) + cached * amounts.cached + output * amounts.o
end
