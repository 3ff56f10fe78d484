/*
 * rig_lua.h - tests of the generator's Lua modules that are written in Lua.
 */
#ifndef TESTS_UNIT_RIG_LUA_H
#define TESTS_UNIT_RIG_LUA_H

/* Runs the text in the state of a fresh session, where `require` finds the modules of gen/lua. An
 * error in it, an `assert` that fails among them, fails the test and shows where. */
void run_lua(const char *text);

#endif
