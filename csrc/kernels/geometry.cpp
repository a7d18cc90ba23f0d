#include "geometry.h"

#include <algorithm>

namespace fused {

Range tap_input_range(const ConvDim& dim, int64_t tap) {
  const int64_t shift = dim.padding - tap * dim.dilation;
  return {std::max<int64_t>(0, ceil_div(shift, dim.stride)),
          std::min(dim.input, floor_div(shift + conv_transpose_output_size(dim) - 1, dim.stride) + 1)};
}

Segmentation segment_input(const ConvDim& dim) {
  std::vector<Range> ranges;
  std::vector<int64_t> cuts;
  for (int64_t tap = 0; tap < dim.kernel; ++tap) {
    const Range range = tap_input_range(dim, tap);
    ranges.push_back(range.size() > 0 ? range : Range{});
    if (range.size() > 0) {
      cuts.push_back(range.begin);
      cuts.push_back(range.end);
    }
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());

  Segmentation result;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const Range segment{cuts[i], cuts[i + 1]};
    const bool used = std::any_of(ranges.begin(), ranges.end(), [&](const Range& range) {
      return range.begin <= segment.begin && segment.end <= range.end;
    });
    if (used) result.segments.push_back(segment);
  }
  for (const Range& range : ranges) {
    Range run;
    for (size_t i = 0; i < result.segments.size(); ++i) {
      if (range.begin <= result.segments[i].begin && result.segments[i].end <= range.end) {
        if (run.size() == 0) run.begin = static_cast<int64_t>(i);
        run.end = static_cast<int64_t>(i) + 1;
      }
    }
    result.tap_range.push_back(run);
  }
  return result;
}

}  // namespace fused
