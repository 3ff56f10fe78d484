-- choose.lua - which configuration, or cuBLASLt, computes each GEMM of a model, range of M by range
-- of M.
--
-- In: all GEMMs of the model (plan.lua's), the tuning entries that tuning.lua checked, and what the
-- user forced. Out: each GEMM's `ranges`: { min_tokens, max_tokens, choices }, first choice first;
-- cuBLASLt is always the last one, since it runs on every GPU that libfp8 runs on.
--
-- Three sources, in this order: a forced choice, a measured one (tuning), the model of tile.lua.
-- Under the model generated kernels come first unless cuBLASLt is predicted clearly faster: they
-- need no staging.
--
-- Not obvious: every configuration costs compile time and bytes, so GEMMs of one kind (formats,
-- output, accumulation) share at most KEPT of them, picked for all layers at once.

local tile = require "tile"

local M = {}

local KEPT = 3 -- configurations of a kind of GEMM
local WORTH = 0.03 -- of the time that another one must save on average
local CLEARLY = 1.03 -- cuBLASLt comes first where a generated kernel takes that much longer ...
local CALL = 6e-6 -- s, ... and by more than its call keeps the host longer than a launch does
local USUAL = 8 -- weight of the range that holds the usual tokens, on 1 for another

local range_ends = { 16, 64, 256, 1024, 4096 } -- of M, for one choice each

-- ---- ranges and problems ------------------------------------------------------------------------

-- Ranges from 1 to max_tokens, cut at the usual ends and at those of the tuning entries.
local function ranges_of(gemm, entries)
    local cuts = {}
    local function cut(last)
        if last >= 1 and last < gemm.max_tokens then cuts[last] = true end
    end
    for _, last in ipairs(range_ends) do cut(last) end
    for _, entry in ipairs(entries) do
        cut(entry.min_tokens - 1)
        cut(entry.max_tokens)
    end
    local ends = {}
    for last in pairs(cuts) do ends[#ends + 1] = last end
    table.sort(ends)
    ends[#ends + 1] = gemm.max_tokens
    local list, from = {}, 1
    for i, last in ipairs(ends) do
        list[i] = { min_tokens = from, max_tokens = last }
        from = last + 1
    end
    return list
end

local function holds(range, tokens)
    return tokens >= range.min_tokens and tokens <= range.max_tokens
end

-- The M that stands for a range: the usual one, else the largest.
local function tokens_for(gemm, range)
    return holds(range, gemm.tokens) and gemm.tokens or range.max_tokens
end

local function problem_of(gemm, tokens)
    local function extent(value) return value == "M" and tokens or value end
    return {
        rows = extent(gemm.rows),
        cols = extent(gemm.cols),
        depth = extent(gemm.depth),
        accumulation = gemm.accumulation,
        scaling = gemm.scaling,
        out = gemm.dtype,
        add = gemm.accumulates, -- the usual way of a pass that can
        sms = tile.SMS,
    }
end

-- A pass that accumulates also overwrites, with the same configuration.
local function fits(configuration, problem)
    if not tile.fits(configuration, problem) then return false end
    if not problem.add then return true end
    local overwrite = {}
    for key, value in pairs(problem) do overwrite[key] = value end
    overwrite.add = false
    return tile.fits(configuration, overwrite)
end

-- Whether cuBLASLt is weighed against generated kernels. Where scales are of rows it is not: its
-- sums take a stage of fp32 and a second launch, whose time is no more than an estimate. Where one
-- operand has scales of blocks and the other one scale (the shards of w), it has no product at all.
local function is_weighed(problem) return problem.scaling ~= "row" and problem.scaling ~= "tile" end

-- The best of a set of configurations (nil: of all); nil if none fits.
local function best_of(problem, set)
    for _, item in ipairs(tile.rank(problem)) do
        if (not set or set[item.configuration.name]) and fits(item.configuration, problem) then
            return item
        end
    end
end

-- ---- the configurations of a kind ---------------------------------------------------------------

local function kind_of(gemm)
    return table.concat({ gemm.a_dtype, gemm.b_dtype, gemm.dtype, gemm.accumulation,
        gemm.scaling, gemm.accumulates and "add" or "" }, " ")
end

-- A problem to pick configurations for. Sets of them are tried on it again and again, so their
-- order is found once: names, best first, and their seconds.
local function case_of(problem, weight)
    local case = {
        problem = problem,
        cublaslt = is_weighed(problem) and tile.cublaslt_seconds(problem) or math.huge,
        weight = weight,
        names = {},
        seconds = {},
    }
    for _, item in ipairs(tile.rank(problem)) do
        if fits(item.configuration, problem) then
            case.names[#case.names + 1] = item.configuration.name
            case.seconds[#case.seconds + 1] = item.seconds
        end
    end
    return case
end

-- How many times longer than cuBLASLt a generated kernel may take and still come first.
local function patience(cublaslt) return math.max(CLEARLY, 1 + CALL / cublaslt) end

-- Seconds with a set of configurations and cuBLASLt beside them, generated ones preferred.
local function seconds_with(case, set)
    for i, name in ipairs(case.names) do
        if set[name] then
            local ratio = case.weight == USUAL and patience(case.cublaslt) or CLEARLY
            return math.min(case.seconds[i] / ratio, case.cublaslt)
        end
    end
    return case.cublaslt
end

-- Mean of log(seconds), by weight.
local function burden(cases, set)
    local sum, weight = 0.0, 0
    for _, case in ipairs(cases) do
        sum = sum + case.weight * math.log(seconds_with(case, set))
        weight = weight + case.weight
    end
    return sum / weight
end

-- Adds the configuration that helps most, until none helps enough.
local function set_for(cases)
    local set, count = {}, 0
    local now = burden(cases, set)
    while count < KEPT do
        local best, best_burden
        for _, c in ipairs(tile.configurations) do
            if not set[c.name] and fits(c, cases[1].problem) then
                set[c.name] = true
                local with = burden(cases, set)
                set[c.name] = nil
                if not best or with < best_burden then best, best_burden = c, with end
            end
        end
        if not best or now - best_burden < (count > 0 and WORTH or 0) then break end
        set[best.name] = true
        count, now = count + 1, best_burden
    end
    return set, count
end

-- Whether cuBLASLt comes first beside a set of configurations, and would not beside the best one,
-- for its call.
local function lacks_best(case, set)
    local ratio = patience(case.cublaslt)
    if ratio == CLEARLY then return false end
    local limit = case.cublaslt * ratio
    for i, name in ipairs(case.names) do
        if case.seconds[i] > limit then return i > 1 end
        if set[name] then return false end
    end
    return false
end

-- A configuration that takes the usual tokens from cuBLASLt's call is worth its compilation.
local function add_usual(cases, set, count)
    for _, case in ipairs(cases) do
        if count < KEPT and case.weight == USUAL and lacks_best(case, set) then
            set[case.names[1]] = true
            count = count + 1
        end
    end
    return set
end

local function sets_for(gemms)
    local cases, sets = {}, {}
    for _, gemm in ipairs(gemms) do
        local kind = kind_of(gemm)
        cases[kind] = cases[kind] or {}
        for _, range in ipairs(ranges_of(gemm, {})) do
            local problem = problem_of(gemm, tokens_for(gemm, range))
            table.insert(cases[kind], case_of(problem, holds(range, gemm.tokens) and USUAL or 1))
        end
    end
    for kind, list in pairs(cases) do sets[kind] = add_usual(list, set_for(list)) end
    return sets
end

-- ---- choices ------------------------------------------------------------------------------------

-- Three digits, thousands as they are.
local function figure(problem, seconds)
    local value = tile.flops(problem) / seconds / 1e12
    return value >= 100 and ("%.0f"):format(value) or ("%.3g"):format(value)
end

local function generated(configuration, seconds, reason)
    return {
        backend = "generated",
        configuration = configuration,
        accumulate_configuration = configuration,
        seconds = seconds,
        reason = reason,
    }
end

local function cublaslt(gemm, seconds, reason)
    return {
        backend = "cublaslt",
        seconds = seconds,
        reason = reason and reason .. "; " .. gemm.cublaslt_reason or gemm.cublaslt_reason,
    }
end

local function describe(item, problem, tokens)
    local c = item.configuration
    local rows, cols = tile.tile_of(c)
    return ("predicted %s TFLOP/s at M %d: %d x %d tiles%s, %s of clusters of %d%s, %.0f %% \z
full"):format(
        figure(problem, item.seconds), tokens, rows // c.cluster, cols,
        c.scheduler == "atomic" and " by a counter" or "",
        item.waves == 1 and "1 wave" or item.waves .. " waves", c.cluster * c.slices,
        c.slices > 1 and " over the contraction" or "", 100 * item.full)
end

-- Why no generated configuration computes it.
local function unserved(gemm)
    if gemm.scaling ~= "block" then return "no generated configuration serves it" end
    return ("generated kernels have no scales of this kind (%s)"):format(gemm.scaling)
end

-- By the model.
local function predicted(gemm, range, set)
    local tokens = tokens_for(gemm, range)
    local problem = problem_of(gemm, tokens)
    local item, lt = best_of(problem, set), tile.cublaslt_seconds(problem)
    local lt_figure = figure(problem, lt)
    if gemm.plain then
        return { cublaslt(gemm, lt) }
    elseif not item then
        return { cublaslt(gemm, lt, unserved(gemm)) }
    elseif is_weighed(problem) and item.seconds > lt * patience(lt) then
        return { cublaslt(gemm, lt, ("predicted %s TFLOP/s at M %d, generated %s %s"):format(
            lt_figure, tokens, item.configuration.name, figure(problem, item.seconds))) }
    end
    return {
        generated(item.configuration, item.seconds, describe(item, problem, tokens)
            .. ", cuBLASLt " .. lt_figure),
        cublaslt(gemm, lt, ("predicted %s TFLOP/s"):format(lt_figure)),
    }
end

-- What the user forced: "cublaslt", "generated", or a configuration.
local function forced(gemm, range, word)
    local tokens = tokens_for(gemm, range)
    local problem = problem_of(gemm, tokens)
    local lt, why = tile.cublaslt_seconds(problem), ("gemm = %s is asked for"):format(word)
    local wanted = tile.by_name(word)
    if word == "cublaslt" and gemm.scaling ~= "tile" then return { cublaslt(gemm, lt, why) } end
    local item = best_of(problem, wanted and { [wanted.name] = true })
    if gemm.scaling == "tile" and (word == "cublaslt" or not item) then
        item = best_of(problem)
        why = why .. (word == "cublaslt"
            and ", but cuBLASLt has no product of one scale a tensor by scales of blocks"
            or ", which does not apply scales along the contraction")
    end
    if not item then
        return { cublaslt(gemm, lt, gemm.scaling ~= "block"
            and ("%s, which does not serve %s accumulation into %s"):format(why, gemm.accumulation,
                gemm.dtype)
            or ("%s, but %s"):format(why, unserved(gemm))) }
    end
    return {
        generated(item.configuration, item.seconds, why .. "; " .. describe(item, problem, tokens)),
        cublaslt(gemm, lt),
    }
end

-- As measured.
local function tuned(gemm, range, entry, other)
    local problem = problem_of(gemm, tokens_for(gemm, range))
    local measured = problem_of(gemm, entry.measured_tokens)
    local seconds = entry.microseconds * 1e-6 * tile.flops(problem) / tile.flops(measured)
    local function measured_figure(microseconds) return figure(measured, microseconds * 1e-6) end
    local reason = ("tuned: %s TFLOP/s measured at M %d"):format(
        measured_figure(entry.microseconds), entry.measured_tokens)
    if entry.second then
        reason = ("%s, next %s %s"):format(reason, entry.second.name,
            measured_figure(entry.second.microseconds))
    end
    if entry.bf16 and entry.bf16 < entry.microseconds then
        reason = ("%s; bf16 is faster here: %s"):format(reason, measured_figure(entry.bf16))
    end
    if not entry.configuration then
        local choice = cublaslt(gemm, seconds, reason)
        choice.algo, choice.version = entry.algo, entry.version
        return { choice }
    end
    local choice = generated(entry.configuration, seconds, reason)
    if other and other.configuration then choice.configuration = other.configuration end
    return { choice, cublaslt(gemm, tile.cublaslt_seconds(problem)) }
end

-- The tuning entries of this GEMM: those of the way that it is usually used, and of the other.
-- Files are of GEMMs with one scale a tensor.
local function entries_of(gemm, tuning)
    local usual, other = {}, {}
    if gemm.scaling ~= "tensor" then return usual, other end
    for _, entry in ipairs(tuning) do
        if entry.pass == gemm.pass and entry.N == gemm.N and entry.K == gemm.K
            and entry.a_dtype == gemm.a_dtype and entry.b_dtype == gemm.b_dtype
            and entry.out_dtype == gemm.dtype and entry.accumulation == gemm.accumulation then
            local list = entry.accumulate == gemm.accumulates and usual or other
            list[#list + 1] = entry
        end
    end
    return usual, other
end

local function entry_for(entries, range)
    for _, entry in ipairs(entries) do
        if holds(entry, range.min_tokens) then return entry end
    end
end

local function choose(gemm, set, options)
    local usual, other = {}, {}
    if not options.force then usual, other = entries_of(gemm, options.tuning) end
    local all = table.move(other, 1, #other, #usual + 1, table.move(usual, 1, #usual, 1, {}))
    local ranges = ranges_of(gemm, all)
    for _, range in ipairs(ranges) do
        local entry, second = entry_for(usual, range), entry_for(other, range)
        if options.force then
            range.choices = forced(gemm, range, options.force)
        elseif entry or second then
            range.choices = tuned(gemm, range, entry or second, second)
        else
            range.choices = predicted(gemm, range, set)
        end
        if holds(range, gemm.tokens) then gemm.seconds = range.choices[1].seconds end
    end
    return ranges
end

-- Sets `ranges` of every GEMM, and `seconds`, predicted at the usual tokens. options: force (nil or
-- checked by force_problem), tuning (a list, maybe empty).
function M.choose(gemms, options)
    local sets = sets_for(gemms)
    for _, gemm in ipairs(gemms) do
        gemm.ranges = choose(gemm, sets[kind_of(gemm)], options)
    end
end

-- What is wrong with a forced choice, and a hint; nil if nothing is.
function M.force_problem(word)
    if word == "cublaslt" or word == "generated" or tile.by_name(word) then return nil end
    local names = {}
    for i, c in ipairs(tile.configurations) do names[i] = c.name end
    return ("there is no GEMM '%s'"):format(word),
        "'cublaslt', 'generated', or one of " .. table.concat(names, ", ")
end

return M
